//go:build !race

package sample

// raceDetector is whether the race detector is on.
const raceDetector = false
