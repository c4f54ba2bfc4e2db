// Package pages counts who holds the pages of a cache. It has integers only: no
// memory, no locks, no devices.
//
// A page is a number in [0, Count). A sequence has a page table: token j is in page
// Pages[j/Size], as in PagedAttention (Kwon et al., arXiv:2309.06180). Each page has a
// number of holders. A page that nobody holds is free. Sequences share pages, and a
// shared page is never written: who appends to one gets a copy of it (copy on write).
//
// Pages may lie in several places, as the memories of GPUs. Then those of a sequence go round the places.
//
// Tokens that nobody will read again can be dropped, from some token on: a table has a gap then, and the pages that
// lie in it are released. So a sequence whose readers look back no further than a window has a constant number of pages.
//
// An append is a transaction. Reserve takes the pages of the new tokens, and the table
// stays as it is. Then Commit puts them into the table, or Rollback gives them back.
//
// A call that is refused changes nothing.
package pages
