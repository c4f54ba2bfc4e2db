//go:build !race

package reftest

// RaceEnabled reports whether the race detector is on. It makes tests about ten times slower, and it
// allocates where the code does not.
const RaceEnabled = false
