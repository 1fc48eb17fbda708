package tiering

import "testing"

func TestWhatIsAtWorkIsStillToBeStored(t *testing.T) {
	q := newQueue()
	a, b := newLineage(0), newLineage(1)
	for i, step := range []struct {
		do     func()
		length int
	}{
		{func() { q.add(a) }, 1},
		{func() { q.add(b) }, 2},
		{func() { q.add(a) }, 2},
		{func() { q.take() }, 2},
		{func() { q.add(a) }, 2}, // at work, and queued again: one content
		{func() { q.done() }, 2},
		{func() { q.take() }, 2}, // b
		{func() { q.done() }, 1},
		{func() { q.take() }, 1}, // a once more, and nothing waits
		{func() { q.done() }, 0},
	} {
		if step.do(); q.length() != step.length {
			t.Errorf("step %d: %d, want %d", i, q.length(), step.length)
		}
	}
}
