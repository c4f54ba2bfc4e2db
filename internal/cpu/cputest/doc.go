// Package cputest is what the tests of several packages of internal/cpu have in common. It imports none of these packages, so that the
// tests inside of each can use it.
package cputest
