//go:build race

package testgpu

const RaceEnabled = true
