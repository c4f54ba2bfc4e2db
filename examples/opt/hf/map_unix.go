//go:build darwin || dragonfly || freebsd || netbsd || openbsd

package hf

// largePages does nothing: only Linux takes such a hint for files.
func largePages([]byte) {}
