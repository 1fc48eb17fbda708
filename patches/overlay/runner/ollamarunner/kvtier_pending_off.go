//go:build kvtier_no_pending_rule

package ollamarunner

// This build does not know of batches that are built and not yet computed, so that a test can show what that would do.

func (t *kvTier) settle() {}

func (t *kvTier) beforeRestore() {}

func (t *kvTier) avoid() map[int32]struct{} {
	return nil
}
