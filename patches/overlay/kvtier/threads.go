package kvtier

import (
	"slices"
	"strconv"
	"strings"
)

// Threads is the part of a namespace's `extra` with the number of threads, where bits depend on it; cpu is Computing.CPU. ARM
// processors with products of int8 matrices compute two rows of quantised weights at once, and sum them in another order than one
// alone, but only where a thread has an even number of rows.
func Threads(cpu string, threads int) string {
	if !slices.Contains(strings.Split(cpu, ","), "MATMUL_INT8") {
		return ""
	}
	return Part("threads", strconv.Itoa(threads))
}
