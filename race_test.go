//go:build race

package leanattention_test

const raceEnabled = true
