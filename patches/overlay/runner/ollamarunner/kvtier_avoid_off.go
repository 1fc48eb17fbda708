//go:build kvtier_no_pending_rule

package ollamarunner

// avoid returns nothing in this build. It exists so that a test can show what the rule prevents.
func (t *kvTier) avoid() map[int32]struct{} {
	return nil
}
