//go:build !race

package leanattention_test

// raceEnabled tells tests that the race detector makes them about ten times
// slower, and that it allocates where the code does not.
const raceEnabled = false
