package kvtier

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Gate values: who decides between restoring and recomputing.
const (
	GateAuto      = "auto"
	GateRestore   = "restore"
	GateRecompute = "recompute"
)

// EncodingQ8 rounds the rows that are stored to ggml's q8_0. Answers after a restore may then differ from those of an
// in-memory hit, so that it is never the default.
const EncodingQ8 = "q8_0"

// Config is what the environment says.
type Config struct {
	Socket    string
	MinTokens int    // fewer are neither stored nor restored
	Snapshot  bool   // store what is computed
	Gate      string // auto, restore, recompute
	Encoding  string // "" or EncodingQ8: rows are rounded to q8_0 when they are stored (lossy)
	Salt      string // what is stored is found only by a server with the same one
	Measure   bool   // time a memcpy beside every restore, for benchmarks

	// Progress is how long a request computes before what it has is stored in the middle of it.
	Progress time.Duration
}

const (
	defaultProgress = 10 * time.Second
	maxProgress     = 24 * time.Hour
)

// RoundedTwice is why a quantised cache is not tiered where rows shall be rounded when they are stored.
func RoundedTwice(dtype string) string {
	return fmt.Sprintf("OLLAMA_KV_TIER_ENCODING rounds rows of f16, and this cache is %s already", dtype)
}

// On says whether the tiering is on. It is off unless the environment says otherwise.
func On() bool {
	on, err := strconv.ParseBool(value("OLLAMA_KV_TIERING"))
	return on || err != nil && value("OLLAMA_KV_TIERING") != ""
}

// FromEnv reads the configuration; ok is false when the tiering is off.
func FromEnv() (Config, bool) {
	if !On() {
		return Config{}, false
	}
	c := Config{Socket: socketPath("OLLAMA_KV_TIER_SOCKET"), MinTokens: BlockTokens, Snapshot: true, Gate: GateAuto, Progress: defaultProgress}
	if c.Socket == "" {
		c.Socket = defaultSocket()
	}
	if s := value("OLLAMA_KV_TIER_MIN_TOKENS"); s != "" {
		if n, err := strconv.Atoi(s); err == nil && n >= 1 {
			c.MinTokens = n
		} else {
			slog.Warn("invalid environment variable, using default", "key", "OLLAMA_KV_TIER_MIN_TOKENS", "value", s, "default", c.MinTokens)
		}
	}
	if s := value("OLLAMA_KV_TIER_SNAPSHOT"); s != "" {
		if on, err := strconv.ParseBool(s); err == nil {
			c.Snapshot = on
		} else {
			slog.Warn("invalid environment variable, using default", "key", "OLLAMA_KV_TIER_SNAPSHOT", "value", s, "default", c.Snapshot)
		}
	}
	if s := value("OLLAMA_KV_TIER_PROGRESS_SECONDS"); s != "" {
		if n, err := strconv.ParseFloat(s, 64); err == nil && n >= 0 && n <= maxProgress.Seconds() {
			c.Progress = time.Duration(n * float64(time.Second))
		} else {
			slog.Warn("invalid environment variable, using default", "key", "OLLAMA_KV_TIER_PROGRESS_SECONDS", "value", s, "default", c.Progress)
		}
	}
	switch s := value("OLLAMA_KV_TIER_GATE"); s {
	case "":
	case GateAuto, GateRestore, GateRecompute:
		c.Gate = s
	default:
		slog.Warn("invalid environment variable, using default", "key", "OLLAMA_KV_TIER_GATE", "value", s, "default", c.Gate)
	}
	switch s := value("OLLAMA_KV_TIER_ENCODING"); s {
	case "", "none":
	case EncodingQ8:
		c.Encoding = s
	default:
		slog.Warn("invalid environment variable, using default", "key", "OLLAMA_KV_TIER_ENCODING", "value", s, "default", "none")
	}
	c.Salt = value("OLLAMA_KV_TIER_SALT")
	c.Measure, _ = strconv.ParseBool(value("OLLAMA_KV_TIER_MEASURE"))
	return c, true
}

// NamespaceExtra is what the configuration adds to the description of a namespace. The salt appears as its digest: the
// description is a file that people look at. The encoding is for the sidecar to read: blocks that are rounded must not be
// found by a runner that wants them exact.
func (c Config) NamespaceExtra() string {
	extra := ""
	if c.Salt != "" {
		digest := sha256.Sum256([]byte("kvt-salt-1\x00" + c.Salt))
		extra = Part("salt", hex.EncodeToString(digest[:16]))
	}
	if c.Encoding == EncodingQ8 {
		extra += Part("kv", EncodingQ8)
	}
	return extra
}

// socketPath takes the scheme off that gRPC writes before the path of a Unix socket. An absolute path is taken as it is, as the
// sidecar takes it: a name may end in a space or a quote.
func socketPath(key string) string {
	path := os.Getenv(key)
	if !filepath.IsAbs(path) {
		path = value(key)
	}
	return strings.TrimPrefix(strings.TrimPrefix(path, "unix://"), "unix:")
}

func value(key string) string {
	return strings.Trim(strings.TrimSpace(os.Getenv(key)), "\"'")
}
