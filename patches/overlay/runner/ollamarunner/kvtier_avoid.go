//go:build !kvtier_no_pending_rule

package ollamarunner

// avoid returns the cells that a restore must not use: a batch that is built and not yet computed will write them.
func (t *kvTier) avoid() map[int32]struct{} {
	return t.batches.pending()
}
