package kvtier

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestAProgramBuiltByHandIsNamedByItsBytesAndItsLibraries(t *testing.T) {
	if buildStamp != "" {
		t.Fatal("a test binary has no stamp")
	}
	dir := t.TempDir()
	program, library := filepath.Join(dir, "ollama"), filepath.Join(dir, "lib", "cuda_v12", "libggml-cuda.so")
	write := func(path, content string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]string{}
	name := func(what string) {
		t.Helper()
		digest, err := digestOfProgram(program, filepath.Join(dir, "lib"))
		if err != nil {
			t.Fatal(err)
		}
		if other, ok := seen[digest]; ok {
			t.Errorf("%s has the name of %s", what, other)
		}
		seen[digest] = what
	}
	write(program, "first")
	name("a program without libraries")
	write(program, "other")
	name("another program")
	write(library, "one")
	name("the same with a library")
	write(library, "longer")
	name("a library of another size")
	if err := os.Chtimes(library, time.Time{}, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	name("a library of another time")
	if _, err := digestOfProgram(filepath.Join(dir, "none"), dir); err == nil {
		t.Error("a program that is not there has a name")
	}
}

func TestTheStampIsTheNameOfABuild(t *testing.T) {
	own, err := Build("")
	if err != nil || !strings.HasPrefix(own, "exe-") {
		t.Fatalf("%q %v", own, err)
	}
	buildStamp = "kvtier-build:0123456789abcdef"
	defer func() { buildStamp = "" }()
	stamped, err := Build("")
	if err != nil || stamped != "0123456789abcdef" {
		t.Errorf("%q %v", stamped, err)
	}
	if got := EngineName("ollama-go", "0.16.3", stamped); got != "ollama-go/0.16.3+0123456789abcdef" {
		t.Error(got)
	}
}

func TestNoValueLooksLikeAnotherPart(t *testing.T) {
	for value, want := range map[string]string{"": "", "AVX2,FMA": ";cpu=AVX2,FMA", "a;kv=q8_0": ";cpu=a_kv:q8_0"} {
		if got := Part("cpu", value); got != want {
			t.Errorf("%q: %q", value, got)
		}
	}
}

func TestTheSaltIsInTheNamespaceButCannotBeReadThere(t *testing.T) {
	t.Setenv("OLLAMA_KV_TIERING", "1")
	seen := map[string]bool{}
	for _, salt := range []string{"", "mine", "yours", "Mine"} {
		t.Setenv("OLLAMA_KV_TIER_SALT", salt)
		c, _ := FromEnv()
		extra := c.NamespaceExtra()
		if seen[extra] || (salt != "" && strings.Contains(strings.ToLower(extra), strings.ToLower(salt))) || (salt == "") != (extra == "") {
			t.Errorf("salt %q: %q", salt, extra)
		}
		seen[extra] = true
		if again, _ := FromEnv(); again.NamespaceExtra() != extra {
			t.Errorf("salt %q gives two namespaces", salt)
		}
	}
	t.Setenv("OLLAMA_KV_TIER_ENCODING", "q8_0")
	if c, _ := FromEnv(); !strings.HasSuffix(c.NamespaceExtra(), ";kv=q8_0") || !strings.HasPrefix(c.NamespaceExtra(), ";salt=") {
		t.Error(c.NamespaceExtra())
	}
}
