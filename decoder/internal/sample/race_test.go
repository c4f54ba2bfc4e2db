//go:build race

package sample

// raceDetector reports whether the race detector is on.
const raceDetector = true
