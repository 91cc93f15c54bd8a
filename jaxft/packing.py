"""Packing: plan tables for sequences of different lengths, write the sequences into them, and read them back."""

from jaxft.core.packing import Packing as Packing
from jaxft.core.packing import pack as pack
from jaxft.core.packing import plan_packing as plan_packing
from jaxft.core.packing import plan_padding as plan_padding
from jaxft.core.packing import segments as segments
from jaxft.core.packing import unpack as unpack
