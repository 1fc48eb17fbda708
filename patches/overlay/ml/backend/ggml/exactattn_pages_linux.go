package ggml

import (
	"os"
	"syscall"
	"unsafe"

	"github.com/ollama/ollama/exactattn"
)

// exactAttnLarge is the least memory that has a huge page of 2 MiB inside wherever it begins.
const exactAttnLarge = 4 << 20

// exactAttnHugePages asks for huge pages under K or V that the exact attention will read, before anything is written there. If
// the kernel has none, or may not, all is as it was.
func exactAttnHugePages(memory []byte) {
	if len(memory) < exactAttnLarge || !exactattn.Asked() {
		return
	}
	page := uintptr(os.Getpagesize())
	before := -uintptr(unsafe.Pointer(unsafe.SliceData(memory))) % page // bytes to the first whole page
	_ = syscall.Madvise(memory[before:], syscall.MADV_HUGEPAGE)
}
