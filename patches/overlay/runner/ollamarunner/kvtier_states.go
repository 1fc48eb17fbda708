package ollamarunner

// A model with recurrent layers has, beside rows, states that every batch changes. Stock goes on in memory from a checkpoint: it
// copies the states of that position over those that the slot ended with. When the sequence before has just ended, a batch of it
// is already built, and changes the states when it is computed. A request that has waited for the slot gets the runner's lock
// before that batch does, as a rule: in stock (v0.17.1 to v0.24.0) its answer, and all rows from the checkpoint on, then belong to
// other tokens. With tiering it is computed from its first token on.

// tierResumes is a cache that a sequence can go on from at some positions only: it returns the last one up to to.
type tierResumes interface {
	KVTierResume(seq int, to int32) int32
}

// noteStale notes, and reports, whether the states that stock is about to go back to, for a slot that keeps its first numPast rows, may be
// changed afterwards. The caller holds Server.mu; with it held no batch is begun, but those that were begun may end.
func (h *tierHost) noteStale(numPast int32) bool {
	h.stale = h.states > 0 && numPast > 0 && len(h.batches.pendingWindow(h.states)) > 0
	return h.stale
}
