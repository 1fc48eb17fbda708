package llamarunner

import (
	"slices"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/rows"
	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/llama"
	"github.com/ollama/ollama/ml/backend/ggml"
)

// tierHost is the llama.cpp runner as package tier sees it.
type tierHost struct {
	tiering.NoRunAhead
	server *Server
	rows   *tierRows
}

func (h *tierHost) Lock() {
	h.server.mu.Lock()
	if h.rows != nil {
		h.rows.changed()
	}
}

func (h *tierHost) Unlock() { h.server.mu.Unlock() }

// Quiesce waits for the devices: a batch without outputs is not waited for by the runner. No request is known that would
// miss it: llama_decode waits for the batch before it when it copies its inputs, rows are stored one batch late while a prompt
// is computed (tiering.Launched), and a request ends with an output. The next llama.cpp may overlap batches.
func (h *tierHost) Quiesce() { h.server.lc.KVTierSync() }

func (h *tierHost) BeforeRestore() { h.server.lc.KVTierSync() }

// tierCells is what tierRows needs of a llama.Context.
type tierCells interface {
	KVTierCells(child, seq, size int) (cells, positions []int32)
	KVTierFind(child, seq, from, n int) []int32
	KVTierOccupy(child, seq, from int, cells []int32) bool
	KvCacheSeqRm(seq, from, to int) bool
}

// tierRows are the cells of a llama.cpp context. A model with sliding windows has two caches, which Ollama lets keep all
// rows: both hold the same positions in the same cells, or nothing is done. A slot's rows lie in a stream of its own; stream
// and cell are one number here, as in the tensors.
type tierRows struct {
	context    tierCells
	children   int
	streams    int
	size       int // cells of a stream
	exactShift bool
	planes     [][]rows.Plane // of every stream: K and V of the first layer, of the second, …

	held    map[int][]int32 // slot -> cell of every position, until something changes
	shifted map[int]bool    // slot -> its rows have been moved since it was empty
}

// changed says that cells may have other contents than before.
func (r *tierRows) changed() { clear(r.held) }

func (r *tierRows) stream(slot int) int {
	if r.streams == 1 {
		return 0
	}
	return slot
}

// positions returns the cell of every position of a slot, -1 for those that it does not hold; nil where the caches differ, or
// a position is held twice.
func (r *tierRows) positions(slot int) []int32 {
	if held, ok := r.held[slot]; ok {
		return held
	}
	var held []int32
	cells, positions := r.context.KVTierCells(0, slot, r.size)
	if cells != nil && r.same(slot, cells, positions) {
		held = slices.Repeat([]int32{-1}, r.size)
		for i, p := range positions {
			if p < 0 || int(p) >= r.size || held[p] >= 0 {
				held = nil
				break
			}
			held[p] = cells[i]
		}
	}
	r.held[slot] = held
	return held
}

func (r *tierRows) same(slot int, cells, positions []int32) bool {
	for child := 1; child < r.children; child++ {
		c, p := r.context.KVTierCells(child, slot, r.size)
		if !slices.Equal(c, cells) || !slices.Equal(p, positions) {
			return false
		}
	}
	return true
}

// lost reports whether rows of a slot's first n positions are gone though it still counts them. After a shift llama.cpp looks
// for free cells from the first one on, and in the cache of a window it takes those whose rows nothing sees any more: the kept
// beginning. A prompt that begins alike does see them.
func (r *tierRows) lost(slot, n int) bool {
	if r.children == 1 || n == 0 || !r.shifted[slot] {
		return false
	}
	return r.Cells(slot, 0, n) == nil
}

// Cells implements tiering.Rows.
func (r *tierRows) Cells(slot, from, to int) []int32 {
	held := r.positions(slot)
	if held == nil || from < 0 || to > len(held) {
		return nil
	}
	cells := make([]int32, to-from)
	for i := range cells {
		if held[from+i] < 0 {
			return nil
		}
		cells[i] = int32(r.stream(slot)*r.size) + held[from+i]
	}
	return cells
}

// Find implements tiering.Rows: the cells are those that llama.cpp's own search gives. None where the slot does not hold
// exactly the positions before from.
func (r *tierRows) Find(slot, from, n int, _ map[int32]struct{}) []int32 {
	held := r.positions(slot)
	if held == nil || from+n > len(held) || slices.Contains(held[:from], -1) ||
		slices.ContainsFunc(held[from:], func(cell int32) bool { return cell >= 0 }) {
		return nil
	}
	cells := r.context.KVTierFind(0, slot, from, n)
	for child := 1; child < r.children; child++ {
		if !slices.Equal(r.context.KVTierFind(child, slot, from, n), cells) {
			return nil
		}
	}
	for i := range cells {
		cells[i] += int32(r.stream(slot) * r.size)
	}
	return cells
}

// Occupy implements tiering.Rows. Where a cache does not take the cells, Cells says so afterwards.
func (r *tierRows) Occupy(slot, from int, cells []int32) {
	defer r.changed()
	local := r.local(cells)
	for child := range r.children {
		if !r.context.KVTierOccupy(child, slot, from, local) {
			return
		}
	}
}

// Drop implements tiering.Rows.
func (r *tierRows) Drop(slot, from int) {
	r.context.KvCacheSeqRm(slot, from, -1)
	if from == 0 {
		delete(r.shifted, slot)
	}
	r.changed()
}

// Read implements tiering.Rows.
func (r *tierRows) Read(segment int, cells []int32, dst []byte) {
	r.plane(segment, cells).Read(r.local(cells), dst)
}

// Write implements tiering.Rows.
func (r *tierRows) Write(segment int, cells []int32, chunk rows.Chunk) {
	plane := r.plane(segment, cells)
	part := cells[chunk.Start : chunk.Start+len(chunk.Data)/plane.RowBytes]
	plane.Write(r.local(part), rows.Chunk{Data: chunk.Data})
}

// Memory implements tiering.Rows.
func (r *tierRows) Memory(segment int, cells []int32) [][]byte {
	return r.plane(segment, cells).Memory(r.local(cells))
}

func (r *tierRows) plane(segment int, cells []int32) rows.Plane {
	return r.planes[int(cells[0])/r.size][segment]
}

// local numbers cells of one stream from its first.
func (r *tierRows) local(cells []int32) []int32 {
	if len(cells) == 0 || int(cells[0]) < r.size {
		return cells
	}
	base := cells[0] / int32(r.size) * int32(r.size)
	local := make([]int32, len(cells))
	for i, cell := range cells {
		local[i] = cell - base
	}
	return local
}

// llamaTensor is a tensor of llama.cpp's with what GGML's backend does for both runners.
type llamaTensor struct{ llama.KVTierTensor }

func (t llamaTensor) KVTierGetColumns(runs []rows.Run, stride, columns int, dst []byte) {
	ggml.KVTierGetColumns(t.KVTierPointer(), runs, stride, columns, dst)
}

func (t llamaTensor) KVTierSetColumns(runs []rows.Run, stride, columns int, src []byte) {
	ggml.KVTierSetColumns(t.KVTierPointer(), runs, stride, columns, src)
}

// streamTensor is the part of a tensor that one stream has.
type streamTensor struct {
	tierTensor
	base, size int
}

type tierTensor interface {
	rows.Tensor
	rows.Columns
}

func (t streamTensor) KVTierHost() []byte {
	if host := t.tierTensor.KVTierHost(); host != nil {
		return host[t.base : t.base+t.size]
	}
	return nil
}

func (t streamTensor) KVTierGet(offset int, dst []byte) { t.tierTensor.KVTierGet(t.base+offset, dst) }

func (t streamTensor) KVTierSet(offset int, src []byte) { t.tierTensor.KVTierSet(t.base+offset, src) }

func (t streamTensor) KVTierGetColumns(runs []rows.Run, stride, columns int, dst []byte) {
	t.tierTensor.KVTierGetColumns(t.within(runs), stride, columns, dst)
}

func (t streamTensor) KVTierSetColumns(runs []rows.Run, stride, columns int, src []byte) {
	t.tierTensor.KVTierSetColumns(t.within(runs), stride, columns, src)
}

// within are the runs of the stream in the whole tensor.
func (t streamTensor) within(runs []rows.Run) []rows.Run {
	whole := slices.Clone(runs)
	for i := range whole {
		whole[i].Offset += t.base
	}
	return whole
}

func newTierRows(context tierCells, info llama.KVTierContext, layers []llama.KVTierLayer) *tierRows {
	r := &tierRows{
		context: context, children: info.Children, streams: info.Streams, size: info.Cells, exactShift: info.ExactShift,
		held: make(map[int][]int32), shifted: make(map[int]bool),
	}
	for stream := range info.Streams {
		var planes []rows.Plane
		for _, l := range layers {
			planes = append(planes, rows.Plane{
				Tensor: streamTensor{llamaTensor{l.K}, stream * l.KStreamBytes, l.KStreamBytes}, RowBytes: l.KRowBytes, Cells: info.Cells,
			}, rows.Plane{
				Tensor: streamTensor{llamaTensor{l.V}, stream * l.VStreamBytes, l.VStreamBytes}, RowBytes: l.VRowBytes, Cells: info.Cells,
				Permuted: l.VTransposed,
			})
		}
		r.planes = append(r.planes, planes)
	}
	return r
}

// tierLayers is the geometry of a context in the words of blocks.
func tierLayers(layers []llama.KVTierLayer) (geometry []kvtier.Layer) {
	for _, l := range layers {
		geometry = append(geometry, kvtier.Layer{
			Child: l.Child, Layer: l.Layer, Kind: tierKind(l), Window: l.Window, KVHeads: l.KVHeads, KHeadDim: l.KHeadDim, VHeadDim: l.VHeadDim,
			KRowBytes: l.KRowBytes, VRowBytes: l.VRowBytes,
		})
	}
	return geometry
}

func tierKind(l llama.KVTierLayer) string {
	switch {
	case l.Window == 0:
		return "full"
	case l.Chunked:
		return "chunked"
	}
	return "swa"
}
