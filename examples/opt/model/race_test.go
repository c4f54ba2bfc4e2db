//go:build race

package model

// raceDetector is whether the detector is on, which makes the shipped model slow.
const raceDetector = true
