//go:build race

package reftest

// RaceEnabled tells tests that the race detector makes them about ten times slower, and
// that it allocates where the code does not.
const RaceEnabled = true
