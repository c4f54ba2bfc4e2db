//go:build !(amd64 || arm64) || !gc || noasm

package cpu

var tileTiers [Tiers]*linearTiles // none: all rows are few
