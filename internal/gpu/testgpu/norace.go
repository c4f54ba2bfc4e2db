//go:build !race

package testgpu

const RaceEnabled = false
