"""The inline PTX of the wrappers, executed by C++ functions that implement the PTX ISA's instructions."""
import subprocess
import sys
import unittest

from trainer import ROOT

sys.path.insert(0, str(ROOT / "test/ptx_probe"))
import translate_ptx  # noqa: E402

HEADERS = ["kernels/cuda/ptx.cuh", "kernels/cuda/hopper/ptx_hopper.cuh"]


def words_of(program):
    result = subprocess.run([ROOT / "build" / program], capture_output=True, text=True, timeout=300, check=False)
    return result.returncode, dict(line.rsplit(" ", 1) for line in result.stdout.splitlines()), result.stderr


def careless(source):
    """Yields instructions that the compiler may move across memory accesses, drop or merge. GEMMs of warpgroups are
    exempt: they lie between wgmma.fence and wgmma.commit_group, which may not move."""
    for _, _, is_volatile, (text, _, _, clobbers, *_) in translate_ptx.asm_statements(source):
        names = [name for name, _ in translate_ptx.instructions(text) if name != ".reg"]
        in_registers = (*translate_ptx.REGISTERS_ONLY, "wgmma.mma_async.")
        if '"memory"' not in clobbers and not all(name.startswith(in_registers) for name in names):
            yield f"{' '.join(names)}: memory is not clobbered"
        if not is_volatile and not all(name.startswith(translate_ptx.REPEATABLE) for name in names):
            yield f"{' '.join(names)}: not volatile"


class Text(unittest.TestCase):
    def test_the_text_of_each_wrapper_agrees_with_its_twin(self):
        code, words, said = words_of("ptx_probe_text")
        expected_code, expected, _ = words_of("ptx_probe_simt")
        self.assertEqual((code, expected_code), (0, 0), said)
        self.assertGreaterEqual(len(words), 57)
        self.assertEqual([name for name in expected if words.get(name) != expected[name]], [])
        self.assertEqual(words.keys(), expected.keys())

    def test_memory_accesses_are_declared(self):
        for header in HEADERS:
            source = translate_ptx.device_part(header)
            self.assertGreater(len(list(translate_ptx.asm_statements(source))), 13)
            self.assertEqual(list(careless(source)), [], header)
        self.assertEqual(list(careless('asm("cp.async.commit_group;");')),
                         ["cp.async.commit_group: memory is not clobbered", "cp.async.commit_group: not volatile"])

    def test_operands_keep_the_order_of_the_text(self):
        self.assertEqual(
            translate_ptx.translated('x; asm("cvt.rn.bf16x2.f32 %0, %2, %1;" '
                                     ': "=r"(d[0]) : "f"(low), "f"(g(a, b))); y;'),
            "x; { const auto o1 = isa::read<'f'>(low); const auto o2 = isa::read<'f'>(g(a, b)); "
            "auto& o0 = isa::written<'r'>(d[0]); isa::cvt_rn_bf16x2_f32(o0, o2, o1); } y;")
        self.assertEqual(
            translate_ptx.translated('asm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0; a.m64n8k16 {%0}, [%2, {%1}], '
                                     'p; }" : "+f"(d[0]) : "r"(x), "l"(map) : "memory");'),
            "{ const auto o1 = isa::read<'r'>(x); const auto o2 = isa::read<'l'>(map); auto& o0 = isa::updated<'f'>"
            "(d[0]); bool p = false; isa::setp_ne_b32(p, o1, 0); isa::a_m64nNk16<8>(isa::all(o0), "
            "isa::at(o2, isa::all(o1)), p); }")


if __name__ == "__main__":
    unittest.main()
