//go:build !linux

package model

// largePages does nothing: only Linux takes such a hint.
func largePages([]byte) {}
