// Only where upstream has kvcache/recurrent.go.

package kvcache

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/ml"
)

// A backend that only has memory, of elements of 4 bytes.
type (
	tierStateBackend struct{ ml.Backend }
	tierStateContext struct{ ml.Context }
	tierStateTensor  struct {
		ml.Tensor
		width  int
		data   []byte
		host   bool
		pinned bool // a device writes it there nevertheless
		dtype  ml.DType
	}
)

func (tierStateBackend) NewContextSize(int) ml.Context { return tierStateContext{} }

func (c tierStateContext) Layer(int) ml.Context { return c }

func (tierStateContext) Zeros(dtype ml.DType, dims ...int) ml.Tensor {
	return &tierStateTensor{width: dims[0], data: make([]byte, 4*dims[0]*dims[1]), host: true, dtype: dtype}
}

func (t *tierStateTensor) Stride(n int) int { return 4 * []int{1, t.width}[n] }

func (t *tierStateTensor) DType() ml.DType { return t.dtype }

func (t *tierStateTensor) KVTierHost() []byte {
	if t.host {
		return t.data
	}
	return nil
}

func (t *tierStateTensor) KVTierOnDevice() bool { return !t.host || t.pinned }

func (t *tierStateTensor) KVTierGet(offset int, dst []byte) {
	copy(dst, t.data[offset:offset+len(dst)])
}

func (t *tierStateTensor) KVTierSet(offset int, src []byte) {
	copy(t.data[offset:offset+len(src)], src)
}

func (t *tierStateTensor) KVTierCopiesColumns() bool { panic("a state has no columns") }

func (t *tierStateTensor) KVTierGetColumns([]rows.Run, int, int, []byte) {
	panic("a state has no columns")
}

func (t *tierStateTensor) KVTierSetColumns([]rows.Run, int, int, []byte) {
	panic("a state has no columns")
}

// tierTestRecurrent is a cache of one layer with rows, one with both states, and one with a convolution only.
func tierTestRecurrent(slots int) *Recurrent {
	c := NewRecurrentCache(RecurrentConfig{ConvDim: 3, ConvChannels: 5, RecurrentStateSize: 7})
	c.Init(tierStateBackend{}, ml.DTypeF16, slots, 64, 8)
	c.kv = tierTestCache(false, true)
	for _, layer := range []int{4, 1} {
		c.convBuffer(layer)
		c.reserveCheckpointConv(layer)
	}
	c.recurrentBuffer(4)
	c.reserveCheckpointRecurrent(4)
	return c
}

func tierTestStates(t *testing.T, c *Recurrent) *tierStates {
	t.Helper()
	cache, reason := KVTierCacheOf(struct{ *Recurrent }{c}) // as models have it
	if reason != "" {
		t.Fatal(reason)
	}
	states, child := cache.States()
	if states == nil || child != 1 {
		t.Fatalf("states %v of child %d", states, child)
	}
	return states.(*tierStates)
}

// note is what stock does when it builds a batch that ends with pos; what the batch computes holds salt in every byte.
func (s *tierStates) note(seq int, pos int32, salt byte) {
	if _, used := s.cache.slotForSeq[seq]; !used {
		row, _ := s.cache.allocSlot()
		s.cache.slotForSeq[seq], s.cache.refCount[row] = row, 1
	}
	at := s.cache.checkpointStore(0).record(pos)
	for i, state := range s.tensors {
		data := s.checkpoint(state, at).(*tierStateTensor).data
		copy(data, bytes.Repeat([]byte{salt + byte(i)}, len(data)))
	}
}

// read returns all bytes of a checkpoint.
func (s *tierStates) read(cells []int32) (all []byte) {
	for i, l := range s.Layers(1) {
		for v, n := range []int{l.KRowBytes, l.VRowBytes} {
			part := make([]byte, n)
			s.Read(2*i+v, cells, part)
			all = append(all, part...)
		}
	}
	return all
}

func (s *tierStates) write(cells []int32, all []byte) {
	for i, l := range s.Layers(1) {
		for v, n := range []int{l.KRowBytes, l.VRowBytes} {
			s.Write(2*i+v, cells, rows.Chunk{Data: all[:n]})
			all = all[n:]
		}
	}
}

func TestStatesComeBackAsStockWouldGoBackToThem(t *testing.T) {
	for _, host := range []bool{true, false} {
		from := tierTestStates(t, tierTestRecurrent(1))
		from.note(0, 511, 10)
		from.note(0, 2303, 20)
		if got := from.Checkpoints(0); !slices.Equal(got, []int{512, 2304}) {
			t.Fatalf("checkpoints %v", got)
		}
		cells := from.Cells(0, 2303, 2304)
		if len(cells) != 1 || from.Cells(0, 2302, 2303) != nil || from.Cells(0, 2300, 2304) != nil || from.Cells(1, 2303, 2304) != nil {
			t.Fatalf("cells %v", cells)
		}
		all := from.read(cells)
		if want := 4 * (3*5 + 3*5 + 7); len(all) != want {
			t.Fatalf("%d bytes, want %d", len(all), want)
		}

		c := tierTestRecurrent(1)
		to := tierTestStates(t, c)
		to.note(0, 16, 99) // of another content
		for _, state := range to.tensors {
			to.current(state).(*tierStateTensor).host = host
			for _, tensor := range to.checkpoints(state) {
				tensor.(*tierStateTensor).host = host
			}
		}
		if !to.Free(0, cells, nil) || to.Free(0, cells, map[int32]struct{}{0: {}}) {
			t.Error("only a batch that is built is in the way")
		}
		to.Drop(0, 0)
		if to.Checkpoints(0) != nil || !to.Free(0, cells, nil) {
			t.Error("the other content is still there")
		}
		to.write(cells, all)
		to.Occupy(0, 2303, cells)
		if got := to.Cells(0, 2303, 2304); !slices.Equal(got, cells) || !bytes.Equal(to.read(got), all) {
			t.Errorf("the checkpoint is not what was read: cells %v", got)
		}
		for i, state := range to.tensors {
			data := to.current(state).(*tierStateTensor).data
			if want := bytes.Repeat([]byte{20 + byte(i)}, len(data)); !bytes.Equal(data, want) {
				t.Errorf("state %d is %v", i, data)
			}
		}
		if at, ok := c.PrepareRestore(0, 3000); !ok || at != 2304 {
			t.Errorf("stock would go back to %d, %v", at, ok)
		}
		if store := c.checkpoints[0]; store.lastPos != 2303 || store.size != 1 || int32(store.next) == cells[0] {
			t.Errorf("the next checkpoint would be another than after going back: %+v", store)
		}
	}
}

func TestWhatIsInMemoryOfStatesIsWhatStockFinds(t *testing.T) {
	c := tierTestRecurrent(1)
	s := tierTestStates(t, c)
	for _, pos := range []int32{30, 1700, 4000} {
		s.note(0, pos, 1)
	}
	for target := int32(0); target < 4100; target++ {
		want, ok := c.PrepareRestore(0, target)
		if !ok {
			want = 0
		}
		if got := c.KVTierResume(0, target); got != want {
			t.Fatalf("up to %d: %d, stock goes back to %d", target, got, want)
		}
	}
	if got := c.KVTierResume(1, 4000); got != 0 {
		t.Errorf("of an unused slot: %d", got)
	}
}

func TestDroppedStatesBeginWithZeros(t *testing.T) {
	c := tierTestRecurrent(1)
	s := tierTestStates(t, c)
	s.note(0, 100, 1)
	s.Drop(0, 0)
	s.Drop(0, 0)
	// Stock fills a row with zeros when it gives it to a sequence that has none.
	if _, used := c.slotForSeq[0]; used || !slices.Equal(c.freeSlots, []int{0}) || c.refCount[0] != 0 {
		t.Errorf("rows of sequences %v, free %v, used %v", c.slotForSeq, c.freeSlots, c.refCount)
	}
	s.Occupy(0, 50, []int32{3})
	if c.slotForSeq[0] != 0 || len(c.freeSlots) != 0 || c.refCount[0] != 1 {
		t.Errorf("rows of sequences %v, free %v, used %v", c.slotForSeq, c.freeSlots, c.refCount)
	}
}

func TestStatesThatCannotBeHadAreRefused(t *testing.T) {
	for want, c := range map[string]func() *Recurrent{
		"states of recurrent layers for several slots": func() *Recurrent { return tierTestRecurrent(2) },
		"recurrent layers without states": func() *Recurrent {
			c := tierTestRecurrent(1)
			clear(c.convStates)
			clear(c.recurrentStates)
			return c
		},
		"states of recurrent layers without checkpoints": func() *Recurrent {
			c := tierTestRecurrent(1)
			clear(c.checkpoints)
			return c
		},
		"checkpoints of recurrent layers that are not all there": func() *Recurrent {
			c := tierTestRecurrent(1)
			delete(c.checkpoints[0].entries[5].conv, 4)
			return c
		},
		"states of recurrent layers that can't be accessed": func() *Recurrent {
			c := tierTestRecurrent(1)
			c.convStates[1].(*tierStateTensor).dtype = ml.DTypeF16
			return c
		},
	} {
		if _, reason := KVTierCacheOf(struct{ *Recurrent }{c()}); reason != want {
			t.Errorf("refused because %q, want %q", reason, want)
		}
	}
}

func TestStatesSayWhoComputesThem(t *testing.T) {
	s := tierTestStates(t, tierTestRecurrent(1))
	if got := s.ComputedBy(); got != "hhh" || !s.OnHost() {
		t.Errorf("computed by %s", got)
	}
	state := s.cache.recurrentStates[4].(*tierStateTensor)
	for _, host := range []bool{false, true} { // in its own memory, in the host's
		state.host, state.pinned = host, true
		if got := s.ComputedBy(); got != "hhd" || s.OnHost() {
			t.Errorf("computed by %s, on the host: %v", got, s.OnHost())
		}
	}
	layers := s.Layers(1)
	if len(layers) != 3 || layers[0].Layer != 2 || layers[1].Layer != 8 || layers[2].Layer != 9 || layers[2].KRowBytes+layers[2].VRowBytes != 28 {
		t.Errorf("%+v", layers)
	}
}

func TestTierACacheThatHasMoreThanTheRecurrentOneItEmbedsIsRefused(t *testing.T) {
	type model struct { // as upstream's models have it
		*Recurrent
		layers int
		named  map[string]bool
	}
	type indexed struct {
		*Recurrent
		index map[int]ml.Tensor
	}
	type twice struct {
		*Recurrent
		other *Causal
	}
	type anything struct {
		*Recurrent
		more any
	}
	recurrent := tierTestRecurrent(1)
	if _, reason := KVTierCacheOf(&model{Recurrent: recurrent}); reason != "" {
		t.Errorf("a model's own type, without rows of its own: %s", reason)
	}
	for field, cache := range map[string]tierHybrid{
		"indexed.index": &indexed{Recurrent: recurrent}, "twice.other": &twice{Recurrent: recurrent}, "anything.more": &anything{Recurrent: recurrent},
	} {
		c, reason := KVTierCacheOf(cache.(Cache))
		if c != nil || !strings.Contains(reason, field) {
			t.Errorf("%s: %q", field, reason)
		}
	}
	if unknown := tierUnknown(recurrent); unknown != "" {
		t.Errorf("stock's own: %s", unknown)
	}
}
