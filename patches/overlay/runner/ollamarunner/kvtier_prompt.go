package ollamarunner

import (
	"crypto/sha256"
	"hash/maphash"
	"slices"
	"sync"

	"github.com/ollama/ollama/kvtier"
	"github.com/ollama/ollama/kvtier/tiering"
	"github.com/ollama/ollama/model/input"
)

// The inputs of an image have the same tokens whatever it shows. What tells one from another is the digest of its bytes, which
// stands at the first input of each of its parts: the one that stock gives a hash.

// tierImagesKnown is how many images' digests are kept.
const tierImagesKnown = 4096

// tierImages are the digests of the images that have come, by the hashes that their inputs have. The zero value is ready.
type tierImages struct {
	mu      sync.Mutex
	seed    maphash.Seed
	digests map[uint64]kvtier.Key // zero: of several images
	order   []uint64              // as they came
}

var tierKnown tierImages

// tierImageHash is the hash of an image's inputs: stock's own, unless the tiering is on. Stock's says nothing of which bytes
// were hashed, and two requests at once may write into it between each other.
func tierImageHash(stock uint64, image []byte) (hash uint64) {
	if tiering.Active() == nil {
		return stock
	}
	hash = stock
	defer tiering.Guard("image")
	return tierKnown.add(sha256.Sum256(image))
}

// add returns the hash by which a digest is known from now on. It differs from process to process, as stock's does, so that
// nobody can find images that have the same one.
func (m *tierImages) add(digest kvtier.Key) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.digests == nil {
		m.digests, m.seed = make(map[uint64]kvtier.Key), maphash.MakeSeed()
	}
	return m.put(max(1, maphash.Bytes(m.seed, digest[:])), digest)
}

// put notes whose hash it is. 0 is that of no image.
func (m *tierImages) put(hash uint64, digest kvtier.Key) uint64 {
	known, ok := m.digests[hash]
	switch {
	case !ok:
		m.order = append(m.order, hash)
		m.digests[hash] = digest
	case known != digest:
		m.digests[hash] = kvtier.Key{}
	}
	if len(m.order) > tierImagesKnown {
		delete(m.digests, m.order[0])
		m.order = m.order[1:]
	}
	return hash
}

// digest returns the digest of the image whose inputs have a hash, if there is one and no more.
func (m *tierImages) digest(hash uint64) (digest kvtier.Key, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	digest = m.digests[hash]
	return digest, digest != kvtier.Key{}
}

// tierPrompt is what inputs are to the store, up to the first that can't be told from others. images are those of their request.
func tierPrompt(h *tierHost, inputs []*input.Input, images multimodalStore) tiering.Prompt {
	if h.sharedPositions { // a token's position follows from all images of its prompt
		return tiering.Text(tierTokens(inputs))
	}
	p := tiering.Prompt{Tokens: make([]int32, 0, len(inputs))}
	var last tierPart
	for i, in := range inputs {
		if in.Multimodal != nil || in.MultimodalHash != 0 {
			digest, ok := tierKnown.digest(in.MultimodalHash)
			part := tierPartOf(in, images)
			if !ok || !part.follows(last) {
				break
			}
			p.Extras = append(p.Extras, kvtier.Extra{Row: uint32(i), Digest: digest[:]})
			last = part
		}
		if in.SameBatch > 0 {
			p.Spans = append(p.Spans, tiering.Span{First: i, Last: i + in.SameBatch})
		}
		p.Tokens = append(p.Tokens, in.Token)
	}
	return p.Whole()
}

// tierPart says which part of an image begins at an input. All parts have the digest of the whole: of a prompt that stock has
// cut to fit, the first part that is left may not be an image's first.
type tierPart struct {
	image  *multimodalEntry
	number int
}

func tierPartOf(in *input.Input, images multimodalStore) tierPart {
	if len(in.Multimodal) == 0 || images[in.Multimodal[0].Tensor] == nil {
		return tierPart{number: -1}
	}
	image := images[in.Multimodal[0].Tensor]
	return tierPart{image, slices.IndexFunc(image.mm, func(m input.Multimodal) bool { return m.Tensor == in.Multimodal[0].Tensor })}
}

// follows reports whether a part may come after the last one before it in a prompt.
func (p tierPart) follows(last tierPart) bool {
	return p.number == 0 || p.number > 0 && p.image == last.image && p.number == last.number+1
}

// tierCut reports whether a prompt that is gone on with at a position is so inside of a span, which begins at first. Its inputs
// are then not computed together, and nobody else's rows would be the same.
func tierCut(prompt []*input.Input, resume int) (first int, cut bool) {
	for i, in := range prompt[:resume] {
		if in.SameBatch > 0 && i+in.SameBatch >= resume {
			return i, true
		}
	}
	return 0, false
}

// tierBegin is the number of the first input of the span that input i of a batch is in.
func tierBegin(batch input.Batch, inputs []*input.Input, i int) int {
	for first, in := range inputs[:i] {
		if batch.Sequences[first] == batch.Sequences[i] && first+in.SameBatch >= i {
			return first
		}
	}
	return i
}

// tierTokens are the tokens of inputs, up to the first that is no token, or that begins a part of the prompt which is computed in
// one batch: such a part has an image, and nobody may resume inside.
func tierTokens(inputs []*input.Input) []int32 {
	tokens := make([]int32, 0, len(inputs))
	for _, in := range inputs {
		if in.Multimodal != nil || in.MultimodalHash != 0 || in.SameBatch != 0 {
			break
		}
		tokens = append(tokens, in.Token)
	}
	return tokens
}
