//go:build amd64 && gc && !noasm && !linux

package cpu

func allowTiles() bool { return false }
