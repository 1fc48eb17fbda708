package kvtier

import "testing"

func TestThreadsAreSaidWhereTheyChangeBits(t *testing.T) {
	for cpu, want := range map[string]string{
		"":                               "",
		"AVX2,FMA":                       "",
		"NEON,ARM_FMA,DOTPROD":           "", // as of a Raspberry Pi 5
		"NEON,ARM_FMA,MATMUL_INT8,SVE":   ";threads=6",
		"NEON,NO_MATMUL_INT8,SVE_CNT:16": "",
	} {
		if got := Threads(cpu, 6); got != want {
			t.Errorf("%s: %q, want %q", cpu, got, want)
		}
	}
}
