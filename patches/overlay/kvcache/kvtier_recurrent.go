// Only where upstream has kvcache/recurrent.go.

package kvcache

import (
	"cmp"
	"slices"

	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/ml"
)

// tierStates are the states of a Recurrent cache and its checkpoints of them. With one slot, which is all that stock gives such
// a model, states lie in the first row of their tensors.
//
// Locking: as for KVTierRows. A checkpoint that stock has noted is complete when the batch is that it was noted in.
type tierStates struct {
	cache   *Recurrent
	tensors []tierState
}

// tierState names the state tensor of a layer: of its convolution, or the recurrent one.
type tierState struct {
	layer     int
	recurrent bool
}

func (c *Recurrent) tierHybrid() (kv *Causal, states KVTierStates, reason string) {
	s := &tierStates{cache: c}
	for layer := range c.convStates {
		s.tensors = append(s.tensors, tierState{layer, false})
	}
	for layer := range c.recurrentStates {
		s.tensors = append(s.tensors, tierState{layer, true})
	}
	slices.SortFunc(s.tensors, func(a, b tierState) int { return cmp.Compare(a.number(), b.number()) })
	switch store := c.checkpoints[0]; {
	case c.maxSequences != 1:
		return nil, nil, "states of recurrent layers for several slots"
	case len(s.tensors) == 0:
		return nil, nil, "recurrent layers without states"
	case store == nil || len(store.entries) == 0:
		return nil, nil, "states of recurrent layers without checkpoints"
	default:
		for i := range store.entries {
			if !c.entryComplete(&store.entries[i]) {
				return nil, nil, "checkpoints of recurrent layers that are not all there"
			}
		}
	}
	for _, state := range s.tensors {
		for _, tensor := range append(s.checkpoints(state), s.current(state)) {
			if _, ok := tensor.(tierTensor); !ok || tensor.DType() != ml.DTypeF32 {
				return nil, nil, "states of recurrent layers that can't be accessed"
			}
		}
	}
	return c.kv, s, ""
}

// KVTierResume returns the position up to to that a sequence can go on from.
func (c *Recurrent) KVTierResume(seq int, to int32) int32 {
	best := 0
	for _, at := range (&tierStates{cache: c}).Checkpoints(seq) {
		if at <= int(to) {
			best = max(best, at)
		}
	}
	return int32(best)
}

// number is that of the layer which the state is in window blocks: they know K and V of layers only, and a layer may have two
// states.
func (s tierState) number() int {
	if s.recurrent {
		return 2*s.layer + 1
	}
	return 2 * s.layer
}

// current is the tensor that a state is computed in.
func (s *tierStates) current(state tierState) ml.Tensor {
	if state.recurrent {
		return s.cache.recurrentStates[state.layer]
	}
	return s.cache.convStates[state.layer]
}

// checkpoint is the tensor of one checkpoint.
func (s *tierStates) checkpoint(state tierState, cell int) ml.Tensor {
	entry := s.cache.checkpoints[0].entries[cell]
	if state.recurrent {
		return entry.recurrent[state.layer]
	}
	return entry.conv[state.layer]
}

func (s *tierStates) checkpoints(state tierState) (tensors []ml.Tensor) {
	for cell := range s.cache.checkpoints[0].entries {
		tensors = append(tensors, s.checkpoint(state, cell))
	}
	return tensors
}

func (s *tierStates) bytes(state tierState) int { return s.current(state).Stride(1) }

// half is the place of a segment in a state's bytes: K is the first half of them, V the other.
func (s *tierStates) half(segment int) (state tierState, from, to int) {
	state = s.tensors[segment/2]
	all := s.bytes(state)
	if segment%2 == 0 {
		return state, 0, all / 2
	}
	return state, all / 2, all
}

func (s *tierStates) Layers(child int) (layers []KVTierLayer) {
	for _, state := range s.tensors {
		all := s.bytes(state)
		layers = append(layers, KVTierLayer{
			Child: child, Layer: state.number(), Kind: "state", KRowBytes: all / 2, VRowBytes: all - all/2,
		})
	}
	return layers
}

func (s *tierStates) Places() int { return len(s.cache.checkpoints[0].entries) }

// ComputedBy says of every state whether the host computes it (h) or a device does (d).
func (s *tierStates) ComputedBy() string {
	var tensors []ml.Tensor
	for _, state := range s.tensors {
		tensors = append(tensors, s.current(state))
	}
	return tierComputedBy(tensors)
}

func (s *tierStates) OnHost() bool {
	return !slices.ContainsFunc(s.tensors, func(state tierState) bool { return !tierSynchronous(s.current(state)) })
}

func (s *tierStates) Checkpoints(slot int) (ends []int) {
	store, ok := s.cache.checkpoints[0]
	if _, used := s.cache.slotForSeq[slot]; !ok || !used {
		return nil
	}
	for _, entry := range store.entries {
		if entry.pos >= 0 {
			ends = append(ends, int(entry.pos)+1)
		}
	}
	slices.Sort(ends)
	return ends
}

// Cells returns the checkpoint that was noted after the one row from.
func (s *tierStates) Cells(slot, from, to int) []int32 {
	if _, used := s.cache.slotForSeq[slot]; !used || to != from+1 {
		return nil
	}
	for cell, entry := range s.cache.checkpoints[0].entries {
		if int(entry.pos) == from {
			return []int32{int32(cell)}
		}
	}
	return nil
}

func (s *tierStates) Read(segment int, cells []int32, dst []byte) {
	state, from, to := s.half(segment)
	tensor := s.checkpoint(state, int(cells[0])).(rows.Tensor)
	if host := tensor.KVTierHost(); host != nil {
		copy(dst, host[from:to])
	} else {
		tensor.KVTierGet(from, dst)
	}
}

// Write writes a part of a checkpoint, and of what is gone on from.
func (s *tierStates) Write(segment int, cells []int32, chunk rows.Chunk) {
	state, from, _ := s.half(segment)
	for _, t := range []ml.Tensor{s.checkpoint(state, int(cells[0])), s.current(state)} {
		tensor := t.(rows.Tensor)
		if host := tensor.KVTierHost(); host != nil {
			copy(host[from:], chunk.Data)
		} else {
			tensor.KVTierSet(from, chunk.Data)
		}
	}
}

// Occupy gives the slot the states that have been written, as if stock had gone back to the checkpoint: the next one is noted
// as far from it as after that.
func (s *tierStates) Occupy(slot, from int, cells []int32) {
	c := s.cache
	if _, used := c.slotForSeq[slot]; !used {
		row, err := c.allocSlot()
		if err != nil {
			return
		}
		c.slotForSeq[slot], c.refCount[row] = row, 1
	}
	store := c.checkpoints[0]
	store.entries[cells[0]].pos = int32(from)
	store.pruneAfter(int32(from))
}

// Drop takes the states of the slot away, whole: what is computed next begins with zeros, as in Remove.
func (s *tierStates) Drop(slot, _ int) {
	c := s.cache
	row, used := c.slotForSeq[slot]
	if !used {
		return
	}
	c.refCount[row] = 0
	c.clearCheckpoints(row)
	c.freeSlot(row)
	delete(c.slotForSeq, slot)
}

// Free reports whether no batch is built that would still change the states: it would not know that they are others.
func (s *tierStates) Free(slot int, cells []int32, avoid map[int32]struct{}) bool {
	_, used := s.cache.slotForSeq[slot]
	return len(avoid) == 0 && len(cells) == 1 && (used || len(s.cache.freeSlots) > 0)
}
