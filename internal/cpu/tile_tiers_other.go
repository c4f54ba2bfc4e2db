//go:build !(amd64 || arm64) || !gc || noasm

package cpu

var TileTiers [Tiers]*LinearTiles // none: all rows are few
