//go:build !linux

package ggml

// tierHugePages asks for nothing: other systems choose their pages themselves.
func tierHugePages([]byte) {}
