package kvcache

import (
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/ml"
)

// tierTensorFake is a tensor of 2-byte elements; host says whether the CPU may see its memory, pinned that a device writes it
// there nevertheless.
type tierTensorFake struct {
	ml.Tensor
	dims                  []int
	data                  []byte
	host, pinned, inexact bool
}

func newTierTensorFake(host bool, dims ...int) *tierTensorFake {
	n := 2
	for _, d := range dims {
		n *= d
	}
	return &tierTensorFake{dims: dims, data: make([]byte, n), host: host}
}

func (t *tierTensorFake) Dim(n int) int { return t.dims[n] }

func (t *tierTensorFake) Stride(n int) int {
	s := 2
	for i := range n {
		s *= t.dims[i]
	}
	return s
}

func (t *tierTensorFake) DType() ml.DType { return ml.DTypeF16 }

func (t *tierTensorFake) KVTierHost() []byte {
	if t.host {
		return t.data
	}
	return nil
}

func (t *tierTensorFake) KVTierOnDevice() bool { return !t.host || t.pinned }

func (t *tierTensorFake) KVTierGet(offset int, dst []byte) { copy(dst, t.data[offset:offset+len(dst)]) }

func (t *tierTensorFake) KVTierSet(offset int, src []byte) { copy(t.data[offset:offset+len(src)], src) }

func (t *tierTensorFake) KVTierCopiesColumns() bool { return !t.inexact }

func (t *tierTensorFake) KVTierGetColumns(runs []rows.Run, stride, columns int, dst []byte) {
	for _, run := range runs {
		for i := range columns {
			t.KVTierGet(run.Offset+i*stride, dst[:2*run.Cells])
			dst = dst[2*run.Cells:]
		}
	}
}

func (t *tierTensorFake) KVTierSetColumns(runs []rows.Run, stride, columns int, src []byte) {
	for _, run := range runs {
		for i := range columns {
			t.KVTierSet(run.Offset+i*stride, src[:2*run.Cells])
			src = src[2*run.Cells:]
		}
	}
}
