package ollamarunner

// A model with recurrent layers has, beside rows, states that every batch changes. Stock goes on in memory from a checkpoint: it
// copies the states of that position over those that the slot ended with. When the sequence before has just ended, a batch of it
// is already built, and changes the states when it is computed. If it has begun, stock's copying waits for it. A request that gets
// the runner's lock before that batch does would go on from changed states (read in v0.17.1 to v0.24.0, not seen): with tiering it is
// computed from its first token on.

// tierResumes is a cache that a sequence can go on from at some positions only: it returns the last one up to to.
type tierResumes interface {
	KVTierResume(seq int, to int32) int32
}

// noteStale notes, and reports, whether the states that stock is about to go back to, for a slot that keeps its first numPast rows,
// will be changed afterwards. The caller holds Server.mu: no batch is begun, and those that were begun end without it.
func (h *tierHost) noteStale(numPast int32) bool {
	h.stale = false
	if h.states > 0 && numPast > 0 {
		h.batches.waitNoneRunning() // stock's copying would wait for them, too
		h.stale = len(h.batches.pendingWindow(h.states)) > 0
	}
	return h.stale
}
