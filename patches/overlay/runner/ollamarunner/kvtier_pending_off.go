//go:build kvtier_no_pending_rule

package ollamarunner

// This build does not know of batches that are built and not yet computed, so that a test can show what that would do.

func (h *tierHost) AwaitBuilt() {}

func (h *tierHost) BeforeRestore() {}

func (h *tierHost) Avoid() map[int32]struct{} {
	return nil
}

func (h *tierHost) AvoidWindow(int) map[int32]struct{} { return nil }
