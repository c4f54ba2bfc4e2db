//go:build !linux

package dense

// LargePages does nothing: only Linux takes such a hint.
func LargePages([]byte) {}
