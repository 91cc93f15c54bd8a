"""Sequences of many lengths in rows of one width: plan where each goes, put them there, and take them out again."""

from jaxft.core.packing import Packing as Packing
from jaxft.core.packing import pack as pack
from jaxft.core.packing import plan_packing as plan_packing
from jaxft.core.packing import plan_padding as plan_padding
from jaxft.core.packing import segments as segments
from jaxft.core.packing import unpack as unpack
