package ollamarunner

// A model with recurrent layers has, beside rows, states that every batch changes. Stock goes on in memory from a checkpoint: it
// copies the states of that position over those that the slot ended with. When the sequence before has just ended, a batch of
// it may still be to be computed, which then changes what was copied: the answer, and all rows from there on, belong to other
// tokens. That stays in memory, as in stock; it must not be stored.

// tierResumes is a cache that a sequence can go on from at some positions only: it returns the last one up to to.
type tierResumes interface {
	KVTierResume(seq int, to int32) int32
}

// noteStale notes whether the states that stock is about to go back to, for a slot that keeps its first numPast rows, may be
// changed afterwards. The caller holds Server.mu; with it held no batch is begun, and those that were begun may still end.
func (h *tierHost) noteStale(numPast int32) {
	h.stale = h.states > 0 && numPast > 0 && len(h.batches.pendingWindow(h.states)) > 0
}
