package ggml

import (
	"testing"

	"github.com/ollama/ollama/ml"
)

// Types by their numbers in ggml.h: a test has no cgo.
func TestExactAttnOnlyWeightsThatAreKnownToHaveTheSameBitsForAnyCut(t *testing.T) {
	const f32, f16, q80, q4k, iq4nl, bf16, mxfp4, unknown = 0, 1, 8, 12, 20, 30, 39, 999
	for _, of := range []uint32{f32, f16, bf16, q80, q4k, mxfp4} {
		if !exactAttnSameForAnyCut(of, 64, 1) {
			t.Errorf("type %d", of)
		}
	}
	for _, of := range []uint32{iq4nl, unknown} {
		if exactAttnSameForAnyCut(of, 64, 1) {
			t.Errorf("type %d is believed to", of)
		}
		if !exactAttnSameForAnyCut(of, 1, 1) {
			t.Errorf("a vector of type %d multiplies nothing", of)
		}
	}
	if exactAttnSameForAnyCut(f32, 64, 4) || !exactAttnSameForAnyCut(f16, 64, 4) || !exactAttnSameForAnyCut(bf16, 64, 4) {
		t.Error("several matrices: f32 is not, f16 and bf16 are")
	}
}

func TestExactAttnWhatReadsACacheOtherThanInTheOrderOfPositionsIsFound(t *testing.T) {
	const dim, heads, cells, queries = 64, 2, 32, 3
	type tensors struct{ q, k, v, mask, other ml.Tensor } // mask knows the positions, other does not
	attend := func(ctx ml.Context, x tensors, mask ml.Tensor) ml.Tensor {
		key := x.k.View(ctx, 0, dim, x.k.Stride(1), heads, x.k.Stride(2), cells)
		return x.q.(ml.ScaledDotProductAttention).ScaledDotProductAttention(ctx, key, x.v, mask, nil, nil, 1, true)
	}
	for name, c := range map[string]struct {
		build func(ctx ml.Context, x tensors) []ml.Tensor
		want  string
	}{
		"attention": {build: func(ctx ml.Context, x tensors) []ml.Tensor { return []ml.Tensor{attend(ctx, x, x.mask)} }},
		"of two layers one without positions": {
			build: func(ctx ml.Context, x tensors) []ml.Tensor {
				return []ml.Tensor{attend(ctx, x, x.mask).Add(ctx, attend(ctx, x, x.other))}
			},
			want: "FLASH_ATTN_EXT",
		},
		"a mask that was changed": {
			build: func(ctx ml.Context, x tensors) []ml.Tensor {
				return []ml.Tensor{attend(ctx, x, x.mask.Contiguous(ctx))}
			},
			want: "FLASH_ATTN_EXT",
		},
		"products of its own": {
			build: func(ctx ml.Context, x tensors) []ml.Tensor {
				return []ml.Tensor{x.k.Permute(ctx, 0, 2, 1, 3).Mulmat(ctx, x.q.Permute(ctx, 0, 2, 1, 3))}
			},
			want: "MUL_MAT",
		},
		"attention to a copy": {
			build: func(ctx ml.Context, x tensors) []ml.Tensor {
				x.v = x.v.Contiguous(ctx)
				return []ml.Tensor{attend(ctx, x, x.mask)}
			},
			want: "CONT",
		},
		"rows that are written": {build: func(ctx ml.Context, x tensors) []ml.Tensor {
			rows := ctx.FromFloats(make([]float32, dim*heads*queries), dim*heads, queries)
			return []ml.Tensor{x.k.Reshape(ctx, dim*heads, cells).SetRows(ctx, rows, ctx.FromInts([]int32{4, 9, 2}, queries))}
		}},
		"rows that are written from others": {
			build: func(ctx ml.Context, x tensors) []ml.Tensor {
				rows := x.v.View(ctx, 0, dim*heads, x.v.Stride(2), queries)
				return []ml.Tensor{x.k.Reshape(ctx, dim*heads, cells).SetRows(ctx, rows, ctx.FromInts([]int32{4, 9, 2}, queries))}
			},
			want: "SET_ROWS",
		},
		"an encoder's attention": {build: func(ctx ml.Context, x tensors) []ml.Tensor {
			x.k, x.v = ctx.Zeros(ml.DTypeF16, dim, heads, cells), ctx.Zeros(ml.DTypeF16, dim, heads, cells)
			return []ml.Tensor{attend(ctx, x, x.other)}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := setup(t).(*Context)
			ctx.b.flashAttention = ml.FlashAttentionEnabled
			x := tensors{
				q: ctx.Zeros(ml.DTypeF32, dim, heads, queries),
				k: ctx.Zeros(ml.DTypeF32, dim, heads, cells), v: ctx.Zeros(ml.DTypeF32, dim, heads, cells),
				mask: ctx.Zeros(ml.DTypeF16, cells, queries), other: ctx.Zeros(ml.DTypeF16, cells, queries),
			}
			x.mask.(*Tensor).positions = ctx.FromInts(make([]int32, cells), cells).(*Tensor)
			reads := ctx.b.ExactAttnReads([]ml.Tensor{x.k, x.v})
			if got := reads(ctx); got != "" {
				t.Errorf("a batch without a graph: %q", got)
			}
			ctx.Forward(c.build(ctx, x)...)
			if got := reads(ctx); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}
