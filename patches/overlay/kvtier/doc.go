// Package kvtier keeps blocks of K/V outside the process: it names them (prefix chain hash under a namespace), lays them
// out (block file format v1) and talks to the sidecar that stores them. It knows nothing of the runner or of ggml.
//
// Every error means "no tiering this time": callers go on as stock Ollama would.
package kvtier

// FormatVersion is the block file format this package reads and writes (docs/format.md of the tiering project).
const FormatVersion = 1

// BlockTokens is the number of positions of a whole block.
const BlockTokens = 64
