//go:build !kvtier_no_pending_rule

package ollamarunner

// AwaitBuilt waits, before any lock is taken, for the batch that was built ahead for a sequence that has ended. It has to be
// computed before the new request's first batch anyway; once it is, restored rows need not go around its cells.
func (h *tierHost) AwaitBuilt() {
	h.batches.awaitBuilt(tierLongestAwait)
}

// BeforeRestore waits until no batch is being computed: one that was built ahead may be writing cells that are free now.
func (h *tierHost) BeforeRestore() {
	h.Quiesce()
}

// Avoid returns the cells that a restore must not use: a batch that is built and not yet computed will write them.
func (h *tierHost) Avoid() map[int32]struct{} {
	return h.batches.pending()
}

// AvoidWindow is Avoid for a cache that drops rows.
func (h *tierHost) AvoidWindow(child int) map[int32]struct{} {
	return h.batches.pendingWindow(child)
}
