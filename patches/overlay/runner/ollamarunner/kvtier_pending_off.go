//go:build kvtier_no_pending_rule

package ollamarunner

// This build lacks the rule about pending cells, so that a test can show what it prevents.

func (t *kvTier) settle() {}

func (t *kvTier) avoid() map[int32]struct{} {
	return nil
}
