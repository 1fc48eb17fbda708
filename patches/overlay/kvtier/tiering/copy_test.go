package tiering

import "testing"

func TestWhatADeviceCopiesFromIsMadeOnceAndKept(t *testing.T) {
	made := 0
	pinned := func(bytes int) []byte {
		made++
		return make([]byte, bytes)
	}
	none := func(int) []byte { return nil }
	for _, c := range []struct {
		name         string
		onHost       bool
		pinned       func(int) []byte
		bytes, least int // asked for, and of each
		made         int // after it was asked for twice
	}{
		{"a device", false, pinned, 100, gatherBytes, 3},
		{"a device that has none", false, none, 100, 100, 0},
		{"more than one has", false, pinned, gatherBytes + 1, gatherBytes + 1, 0},
		{"the host", true, pinned, 100, 100, 0},
		{"a runner that knows none", false, nil, 100, 100, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			tier := fake(t, 1)
			tier.model.OnHost, tier.model.Pinned = c.onHost, c.pinned
			made = 0
			first := map[*byte]bool{}
			for turn := range 2 {
				buffers := tier.readInto(3, c.bytes)
				if len(buffers) != 3 {
					t.Fatalf("%d buffers", len(buffers))
				}
				for range 3 {
					buffer := <-buffers
					if len(buffer) < c.least {
						t.Errorf("%d bytes", len(buffer))
					}
					if kept := first[&buffer[0]]; kept != (turn == 1 && c.made > 0) {
						t.Errorf("turn %d: kept %v", turn, kept)
					}
					first[&buffer[0]] = true
				}
			}
			if made != c.made || len(first) != 3 && len(first) != 6 {
				t.Errorf("%d were made, %d in all", made, len(first))
			}
		})
	}
}
