package kvtier

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// buildStamp is buildMark and a name of what this program was built from: upstream's tree, the patch set, the compilers.
// The linker sets it (ollama_tiering/patchset/identity.py); it is empty in a program that somebody built by hand.
var buildStamp string

// buildMark lets the stamp be found in a binary.
const buildMark = "kvtier-build:"

// Build returns the name of the build. Without a stamp the program's own bytes stand for what it was built from, and names,
// sizes and times of the GGML libraries below libraries: K/V computed by other code differs in its last bits, so that a
// guess will not do.
func Build(libraries string) (string, error) {
	if name, ok := strings.CutPrefix(buildStamp, buildMark); ok {
		return name, nil
	}
	executable, err := os.Executable()
	if err != nil {
		return "", err
	}
	digest, err := digestOfProgram(executable, libraries)
	if err != nil {
		return "", err
	}
	return "exe-" + digest, nil
}

func digestOfProgram(executable, libraries string) (string, error) {
	file, err := os.Open(executable)
	if err != nil {
		return "", err
	}
	defer file.Close()
	h := sha256.New()
	if _, err := io.Copy(h, file); err != nil {
		return "", err
	}
	// Where Ollama looks for libraries: a directory and those in it. Not deeper: it may be a person's home.
	for _, pattern := range []string{"libggml*", "*/libggml*"} {
		found, err := filepath.Glob(filepath.Join(libraries, pattern))
		if err != nil {
			return "", err
		}
		for _, path := range found {
			info, err := os.Stat(path) // of what a link points to
			if err != nil || !info.Mode().IsRegular() {
				continue
			}
			writePrefixed(h, []byte(filepath.Base(path)))
			if err := binary.Write(h, binary.LittleEndian, []int64{info.Size(), info.ModTime().UnixNano()}); err != nil {
				return "", err
			}
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8]), nil
}

// EngineName is the `engine` of a namespace: which engine, of which version, built from what.
func EngineName(engine, version, build string) string {
	return fmt.Sprintf("%s/%s+%s", engine, version, build)
}

// Part returns ";name=value" for the `extra` of a namespace, or "" where there is nothing to say. What separates parts is
// taken out of the value, so that no value can look like another part.
func Part(name, value string) string {
	if value == "" {
		return ""
	}
	return ";" + name + "=" + strings.NewReplacer(";", "_", "=", ":").Replace(value)
}
