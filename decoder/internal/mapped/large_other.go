//go:build !linux

package mapped

func largePages([]byte) {}

func dropPages([]byte) {}
