//go:build !linux

package ggml

// exactAttnHugePages asks for nothing: other systems choose their pages themselves.
func exactAttnHugePages([]byte) {}
