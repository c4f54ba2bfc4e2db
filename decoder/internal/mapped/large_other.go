//go:build !linux

package mapped

// LargePages does nothing on this system.
func LargePages([]byte) {}

func dropPages([]byte) {}
