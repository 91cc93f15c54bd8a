"""`benchmarks/machine.py`: what tells one processor from another."""

import pytest

from machine import cpu_name


@pytest.mark.parametrize(
    ("flags", "widest"),
    [
        ("fpu avx avx2 avx512f", "AVX-512"),
        ("fpu avx avx2", "AVX2"),
        ("fpu avx", "neither AVX-512 nor AVX2"),
    ],
)
def test_the_name_of_a_processor_has_its_generation_and_its_vectors(tmp_path, flags, widest):
    core = f"vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: {flags}\n"
    (tmp_path / "cpuinfo").write_text(f"{core}\n{core}")
    assert cpu_name(tmp_path / "cpuinfo") == f"AMD EPYC (family 25, model 17, {widest})"


@pytest.mark.parametrize("text", [None, "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\n"])
def test_other_processors_have_some_name(tmp_path, text):
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert cpu_name(tmp_path / "cpuinfo")
