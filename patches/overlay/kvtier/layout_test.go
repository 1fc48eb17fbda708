package kvtier

import "testing"

// A quantised row is no multiple of its elements: 4 heads of 64 in q8_0 are 8 groups of 32 values and 2 bytes of scale.
func TestALayoutTakesTheRowBytesAsTheyAre(t *testing.T) {
	layer := Layer{Layer: 1, Kind: "full", KVHeads: 4, KHeadDim: 64, VHeadDim: 64, KRowBytes: 272, VRowBytes: 512}
	l := NewLayout([]Layer{layer}, 3)
	if k, v := l.Segments[0], l.Segments[1]; k.Bytes != 3*272 || k.RowBytes != 272 || v.Bytes != 3*512 || v.RowBytes != 512 {
		t.Errorf("segments %+v", l.Segments)
	}
	if k, v := l.Segments[0], l.Segments[1]; k.Offset != 0 || v.Offset != alignment || l.Bytes != 2*alignment {
		t.Errorf("segments %+v of %d bytes", l.Segments, l.Bytes)
	}
	plain := layer
	plain.KRowBytes = 512
	a, b := Description{Layers: []Layer{layer}}.Proto(), Description{Layers: []Layer{plain}}.Proto()
	if NamespaceOf(a) != NamespaceOf(b) {
		t.Error("row bytes are in the namespace: they follow from dtype, heads and dimensions, and it was made without them")
	}
}
