package ggml

import (
	"os"
	"syscall"
	"unsafe"

	"github.com/ollama/ollama/kvtier"
)

// tierLarge is the least memory that has a huge page of 2 MiB inside wherever it begins.
const tierLarge = 4 << 20

// tierHugePages asks for huge pages under K or V that the exact attention will read, before anything is written there. If
// the kernel has none, or may not, all is as it was.
func tierHugePages(memory []byte) {
	if len(memory) < tierLarge || !kvtier.CPUAttentionExact() {
		return
	}
	page := uintptr(os.Getpagesize())
	before := -uintptr(unsafe.Pointer(unsafe.SliceData(memory))) % page // bytes to the first whole page
	_ = syscall.Madvise(memory[before:], syscall.MADV_HUGEPAGE)
}
