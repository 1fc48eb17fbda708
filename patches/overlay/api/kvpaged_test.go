package api

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestPagedModelsAreNotTakenForModelsOfTheCPU(t *testing.T) {
	const stock = "40%/60% CPU/GPU"
	for _, test := range []struct {
		pinned, mirrored, elsewhere int64
		want                        string
	}{
		{0, 0, 400, stock},
		{400_000_000, 0, 400_000_000, "100% GPU, K/V pinned: 400 MB"},
		{400_000_000, 90_000_000, 400_000_000, "100% GPU, K/V pinned: 400 MB (90 MB of it on GPU as well)"},
		{400_000_000, 0, 500_000_000, stock + ", K/V pinned: 400 MB"},
	} {
		m := ProcessModelResponse{PagedModel: PagedModel{test.pinned, test.mirrored}}
		if got := m.Processor(stock, test.elsewhere); got != test.want {
			t.Errorf("%d pinned of %d: %q, not %q", test.pinned, test.elsewhere, got, test.want)
		}
		said, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(said), "size_pinned") != (test.pinned > 0) {
			t.Errorf("%d pinned: %s", test.pinned, said)
		}
		if strings.Contains(string(said), "size_mirrored") != (test.mirrored > 0) {
			t.Errorf("%d mirrored: %s", test.mirrored, said)
		}
	}
}
