package ggml

import "testing"

// Types by their numbers in ggml.h: a test has no cgo.
func TestExactAttnOnlyWeightsThatAreKnownToHaveTheSameBitsForAnyCut(t *testing.T) {
	const f32, f16, q80, q4k, iq4nl, bf16, mxfp4, unknown = 0, 1, 8, 12, 20, 30, 39, 999
	for _, of := range []uint32{f32, f16, q80, q4k, mxfp4} {
		if !exactAttnSameForAnyCut(of, 64, 1) {
			t.Errorf("type %d", of)
		}
	}
	for _, of := range []uint32{iq4nl, bf16, unknown} {
		if exactAttnSameForAnyCut(of, 64, 1) {
			t.Errorf("type %d is believed to", of)
		}
		if !exactAttnSameForAnyCut(of, 1, 1) {
			t.Errorf("a vector of type %d multiplies nothing", of)
		}
	}
	if exactAttnSameForAnyCut(f32, 64, 4) || !exactAttnSameForAnyCut(f16, 64, 4) {
		t.Error("several matrices: f32 is not, f16 is")
	}
}
