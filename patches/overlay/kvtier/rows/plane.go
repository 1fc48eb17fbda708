// Package rows copies rows of K and V between the cells of a cache and the segments of blocks. In a segment the rows lie in
// position order, each [kv heads][head dim]; in the cache they lie in whatever cells they were given, in whatever layout the
// tensor has. It knows no runner, no cache and no backend.
package rows

// Tensor is what a backend's tensor must offer so that parts of it can be read and written. Offsets and lengths are bytes.
type Tensor interface {
	// KVTierHost returns the tensor's memory if the CPU can access it, else nil.
	KVTierHost() []byte
	KVTierGet(offset int, dst []byte)
	KVTierSet(offset int, src []byte)
}

// Columns is what a tensor offers, too, whose rows may be stored permuted where the CPU can't access them.
type Columns interface {
	// KVTierGetColumns copies runs of cells of each column out of the tensor, which has so many columns, one every stride bytes:
	// into dst one run behind the other, and of a run each column's cells one behind the other. KVTierSetColumns copies them back.
	// Used by several goroutines.
	KVTierGetColumns(runs []Run, stride, columns int, dst []byte)
	KVTierSetColumns(runs []Run, stride, columns int, src []byte)
}

// Run is cells of a column that follow each other.
type Run struct {
	Offset int // in bytes, of the first of them in the first column
	Cells  int
}

// Written is what a tensor offers, too, whose backend has to know of what the host writes.
type Written interface {
	KVTierWritten()
}

// Plane is K or V of one layer: a row for each cell.
//
// The caller sees to it that the rows read have been computed, and that nobody writes the cells written.
type Plane struct {
	Tensor   Tensor
	RowBytes int
	Cells    int  // of the whole tensor
	Permuted bool // stored [cells, head dim, heads]: elements of 2 bytes, those of one row a line of cells apart
}

// Chunk is a run of rows: Data holds the rows of cells[Start], cells[Start+1], …
type Chunk struct {
	Start int
	Data  []byte
}

// Read copies the rows of cells into dst, one after the other.
func (p Plane) Read(cells []int32, dst []byte) {
	host := p.Tensor.KVTierHost()
	if p.Permuted && host == nil {
		columns := make([]byte, len(cells)*p.RowBytes)
		p.Tensor.(Columns).KVTierGetColumns(columnRuns(cells), 2*p.Cells, p.RowBytes/2, columns)
		for start := 0; start < len(cells); {
			n := run(cells[start:])
			part := columns[start*p.RowBytes : (start+n)*p.RowBytes]
			transpose(dst[start*p.RowBytes:], p.RowBytes, part, 2*n, p.RowBytes/2, n)
			start += n
		}
		return
	}
	for start := 0; start < len(cells); {
		n := run(cells[start:])
		first, out := int(cells[start]), dst[start*p.RowBytes:(start+n)*p.RowBytes]
		switch {
		case p.Permuted:
			transpose(out, p.RowBytes, host[2*first:], 2*p.Cells, p.RowBytes/2, n)
		case host != nil:
			copy(out, host[first*p.RowBytes:])
		default:
			p.Tensor.KVTierGet(first*p.RowBytes, out)
		}
		start += n
	}
}

// Write writes the rows of a chunk into cells. Rows of cells that it does not cover are left alone. A tensor the CPU can't
// access is written once per run of cells, or once where it is permuted.
func (p Plane) Write(cells []int32, chunk Chunk) {
	defer p.written() // not before: what is computed meanwhile may have read half of it
	host := p.Tensor.KVTierHost()
	part := cells[chunk.Start : chunk.Start+len(chunk.Data)/p.RowBytes]
	var columns []byte
	if p.Permuted && host == nil {
		columns = make([]byte, len(part)*p.RowBytes)
	}
	for start := 0; start < len(part); {
		n := run(part[start:])
		first, src := int(part[start]), chunk.Data[start*p.RowBytes:(start+n)*p.RowBytes]
		switch {
		case columns != nil:
			transpose(columns[start*p.RowBytes:], 2*n, src, p.RowBytes, n, p.RowBytes/2)
		case p.Permuted:
			transpose(host[2*first:], 2*p.Cells, src, p.RowBytes, n, p.RowBytes/2)
		case host != nil:
			copy(host[first*p.RowBytes:], src)
		default:
			p.Tensor.KVTierSet(first*p.RowBytes, src)
		}
		start += n
	}
	if columns != nil {
		p.Tensor.(Columns).KVTierSetColumns(columnRuns(part), 2*p.Cells, p.RowBytes/2, columns)
	}
}

// columnRuns are the runs of these cells in a column of elements of 2 bytes.
func columnRuns(cells []int32) (runs []Run) {
	for len(cells) > 0 {
		n := run(cells)
		runs = append(runs, Run{Offset: 2 * int(cells[0]), Cells: n})
		cells = cells[n:]
	}
	return runs
}

// written tells the backend that the host has written, or will before another batch is built.
func (p Plane) written() {
	if tensor, ok := p.Tensor.(Written); ok {
		tensor.KVTierWritten()
	}
}

// Memory returns where the rows of cells lie, in their order, for the caller to write them: a piece for each run of cells that
// follow each other. nil where the CPU can't access them, or a row is not in one piece. Until they are written no batch may be
// built.
func (p Plane) Memory(cells []int32) (pieces [][]byte) {
	host := p.Tensor.KVTierHost()
	if p.Permuted || host == nil {
		return nil
	}
	p.written()
	for len(cells) > 0 {
		n, at := run(cells), int(cells[0])*p.RowBytes
		pieces = append(pieces, host[at:at+n*p.RowBytes:at+n*p.RowBytes])
		cells = cells[n:]
	}
	return pieces
}

// run returns how many cells from the first on follow each other.
func run(cells []int32) int {
	n := 1
	for n < len(cells) && cells[n] == cells[0]+int32(n) {
		n++
	}
	return n
}
