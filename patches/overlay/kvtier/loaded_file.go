package kvtier

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// LoadedFile is a file that the model was loaded from, and what told it from others then. Two looks that agree saw the same
// bytes: who writes to a file, or puts another in its place, changes one of the numbers, and nobody can set Ctime back.
type LoadedFile struct {
	Path                string
	Device, Inode, Size uint64
	Mtime, Ctime        int64 // ns
}

// What follows is known before anything of a model has been read.
var (
	startedAt   = time.Now().UnixNano()
	startedWith = modelOf(os.Args[1:])
)

var blobName = regexp.MustCompile(`^sha256-[0-9a-f]{64}$`)

// ContentExtra is the part of a namespace's "extra" of a model whose files are checked: what they are called is what is in them.
var ContentExtra = Part("content", "sha256")

// modelOf looks at the model that a runner was started for.
func modelOf(args []string) LoadedFile {
	for i, arg := range args {
		name, path, given := strings.Cut(arg, "=")
		if name != "--model" && name != "-model" {
			continue
		}
		if !given && i+1 < len(args) {
			path = args[i+1]
		}
		file, _ := LookAt(path) // not there: whoever loads it says so
		return file
	}
	return LoadedFile{}
}

// LoadedBlobs are the files of these paths, whose content the sidecar checks: or why it can't. To be called when all of them
// have been read. Their names are digests, as those of Ollama's blobs are: nothing else is in the namespace of what they hold.
func LoadedBlobs(paths ...string) (files []LoadedFile, reason string) {
	for _, path := range paths {
		if name := filepath.Base(path); !blobName.MatchString(name) {
			return nil, "file that is no blob of Ollama's, named by its digest: " + name
		}
		file, err := LookAt(path)
		if err != nil {
			return nil, "its file can't be looked at: " + err.Error()
		}
		if file.Ctime >= startedAt || startedWith.Path == path && startedWith != file {
			return nil, "its file was changed while it was loaded: load it again"
		}
		files = append(files, file)
	}
	return files, ""
}

// StartedWith is the model that this process was started for, as it was then; empty where it was started for none.
func StartedWith() []LoadedFile {
	if startedWith.Inode == 0 {
		return nil
	}
	return []LoadedFile{startedWith}
}

// LookAt is a file as it is now.
func LookAt(path string) (LoadedFile, error) {
	file := LoadedFile{Path: path}
	return file, file.look()
}
