//go:build !kvtier_no_pending_rule

package ollamarunner

// settle waits, before any lock is taken, for the batch that was built ahead for a sequence that has ended. It has to be
// computed before the new request's first batch anyway; once it is, restored rows need not go around its cells.
func (t *kvTier) settle() {
	t.batches.settle(tierSettleWait)
}

// beforeRestore waits until no batch is being computed: one that was built ahead may be writing cells that are free now.
func (t *kvTier) beforeRestore() {
	t.quiesce()
}

// avoid returns the cells that a restore must not use: a batch that is built and not yet computed will write them.
func (t *kvTier) avoid() map[int32]struct{} {
	return t.batches.pending()
}
