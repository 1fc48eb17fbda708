package tiering

import (
	"errors"
	"time"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tierpb"
)

// The name of a model's file says nothing sure of its content, which decides every row: the file may be damaged, and put right
// later under the same name. So the sidecar reads it, beside, once for each file. Until it is known to be sound nothing is looked
// up, and what is to be stored waits; nobody waits for it before a token.

const (
	contentFirst = 20 * time.Millisecond // between two questions, doubled up to
	contentMost  = time.Second
	contentWait  = 5 * time.Minute // that what a slot holds waits to be stored
	flushUnknown = 2 * time.Second // ... when the model is unloaded
)

const beingChecked = "its file is being checked"

// errUnchecked: the model's file is not known to be sound, which has been said.
var errUnchecked = errors.New("the model's file is not checked")

// learnContent asks until the model's files are known, however long it takes to read them, or the tiering ends: without it no
// request is looked up. wait is how long one question goes on. Each time that the sidecar comes up it is begun anew.
func (t *Tiering) learnContent(wait time.Duration) {
	begun := t.asked.Add(1)
	for t.checkContent(wait) != nil && active.Load() == t && t.asked.Load() == begun {
		time.Sleep(contentMost)
	}
}

// checkContent returns when the model's files are known to be what they were when they were loaded, and what they are called,
// or after wait. It asks each time: a file that was written to under a runner that has it mapped has changed the weights, too.
func (t *Tiering) checkContent(wait time.Duration) error {
	until := time.Now().Add(wait)
	for pause := contentFirst; ; pause = min(2*pause, contentMost) {
		answer, err := t.client.CheckFiles(t.model.Files)
		if err != nil {
			return err
		}
		switch answer.State {
		case tierpb.CheckFilesResponse_STATE_SOUND:
			t.unsound.Store(nil)
			if !t.sound.Swap(true) {
				t.stats.report(t)
			}
			return nil
		case tierpb.CheckFilesResponse_STATE_PENDING:
			if t.sayPending(answer.Reason) {
				t.stats.report(t)
			}
		default:
			t.sound.Store(false)
			t.Withdraw(answer.Reason)
			return errUnchecked
		}
		if time.Now().After(until) || active.Load() != t {
			return errUnchecked
		}
		time.Sleep(pause)
	}
}

// known reports whether the model's files are sound. A request that follows the loading of a model at once waits a moment for the
// sidecar's first word of them: it knows files that it has read before. Where it is still reading them, nobody waits.
func (t *Tiering) known() bool {
	for deadline := time.Now().Add(kvtier.LookupTimeout); !t.sound.Load(); time.Sleep(time.Millisecond) {
		if t.unsound.Load() != nil || t.waited.Load() || active.Load() != t {
			return false
		}
		if time.Now().After(deadline) {
			t.waited.Store(true) // once in all
			return false
		}
	}
	return true
}

// sayPending notes why the files are not known yet, and reports whether that is news.
func (t *Tiering) sayPending(reason string) bool {
	before := t.unsound.Swap(&reason)
	return !t.sound.Load() && (before == nil && reason != beingChecked || before != nil && *before != reason)
}

// pending is why the model's files are not known to be sound; "": they are.
func (t *Tiering) pending() string {
	if t.sound.Load() {
		return ""
	}
	if reason := t.unsound.Load(); reason != nil {
		return *reason
	}
	return beingChecked
}
